"""Consumer with confluent-kafka, equal to Reads.java. usage: BOOTSTRAP TOPIC SINCE_MS"""

import json
import sys

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

bootstrap, topic, since = sys.argv[1], sys.argv[2], int(sys.argv[3])
consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader-confluent"})
numbers = list(consumer.list_topics(topic, timeout=10).topics[topic].partitions)
consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in numbers])
ends = {
    number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=10)[1]
    for number in numbers
}
keys: list[str] = []
while len(keys) < sum(ends.values()):
    message = consumer.poll(10.0)
    assert message is not None, "no message in 10 s"
    assert message.error() is None, message.error()
    key = message.key()
    assert isinstance(key, bytes)
    keys.append(key.decode())
asked = [TopicPartition(topic, number, since) for number in numbers]
found = consumer.offsets_for_times(asked, timeout=10)
admin = AdminClient({"bootstrap.servers": bootstrap})
groups = [group.group_id for group in admin.list_consumer_groups().result().valid]
described = admin.describe_consumer_groups(["millrace-sink"])["millrace-sink"].result()
print(
    json.dumps(
        {
            "keys": keys,
            # -1: behind the end.
            "before": sum(ends[one.partition] if one.offset < 0 else one.offset for one in found),
            "end": sum(ends.values()),
            "groups": groups,
            "members": len(described.members),
            "partitions": len(numbers),
        }
    )
)
consumer.close()
