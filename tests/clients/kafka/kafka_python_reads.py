"""Consumer with kafka-python, equal to Reads.java. usage: BOOTSTRAP TOPIC SINCE_MS"""

import json
import sys

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

bootstrap, topic, since = sys.argv[1], sys.argv[2], int(sys.argv[3])
consumer = KafkaConsumer(
    bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest"
)
numbers = consumer.partitions_for_topic(topic)
partitions = [TopicPartition(topic, number) for number in numbers]
consumer.assign(partitions)
consumer.seek_to_beginning(*partitions)
ends = consumer.end_offsets(partitions)
keys = []
while any(consumer.position(one) < ends[one] for one in partitions):
    for records in consumer.poll(timeout_ms=1_000).values():
        keys += [record.key.decode() for record in records]
found = consumer.offsets_for_times(dict.fromkeys(partitions, since))
before = sum(ends[one] if found[one] is None else found[one].offset for one in partitions)
admin = KafkaAdminClient(bootstrap_servers=bootstrap)
groups = [group["group_id"] for group in admin.list_groups()]
described = admin.describe_groups(["millrace-sink"])["millrace-sink"]
print(
    json.dumps(
        {
            "keys": keys,
            "before": before,
            "end": sum(ends.values()),
            "groups": groups,
            "members": len(described["members"]),
            "partitions": len(numbers),
        }
    )
)
consumer.close()
admin.close()
