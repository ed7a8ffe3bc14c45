// Asks a Kafka, with Java's own client, for all that readers of records ask for; prints it as JSON.
// usage: java -cp 'jars/*' Reads.java BOOTSTRAP TOPIC SINCE_MS

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.admin.ConsumerGroupListing;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

public class Reads {
  public static void main(String[] arguments) throws Exception {
    String topic = arguments[1];
    long since = Long.parseLong(arguments[2]);
    Properties settings = new Properties();
    settings.put("bootstrap.servers", arguments[0]);
    settings.put("auto.offset.reset", "earliest");
    settings.put("enable.auto.commit", "false");
    List<String> keys = new ArrayList<>();
    long atTime = 0;
    long atEnd = 0;
    try (KafkaConsumer<byte[], byte[]> consumer =
        new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
      List<TopicPartition> partitions =
          consumer.partitionsFor(topic).stream()
              .map(info -> new TopicPartition(info.topic(), info.partition()))
              .collect(Collectors.toList());
      consumer.assign(partitions);
      consumer.seekToBeginning(partitions);
      Map<TopicPartition, Long> ends = consumer.endOffsets(partitions);
      while (partitions.stream().anyMatch(one -> consumer.position(one) < ends.get(one))) {
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofSeconds(1))) {
          keys.add(new String(record.key(), StandardCharsets.UTF_8));
        }
      }
      Map<TopicPartition, Long> times = new HashMap<>();
      partitions.forEach(one -> times.put(one, since));
      Map<TopicPartition, OffsetAndTimestamp> found = consumer.offsetsForTimes(times);
      for (TopicPartition one : partitions) {
        long end = ends.get(one);
        atEnd += end;
        atTime += found.get(one) == null ? end : found.get(one).offset();
      }
    }
    try (Admin admin = Admin.create(settings)) {
      List<String> groups =
          admin.listConsumerGroups().all().get().stream()
              .map(ConsumerGroupListing::groupId)
              .collect(Collectors.toList());
      Map<String, ConsumerGroupDescription> described =
          admin.describeConsumerGroups(List.of("millrace-sink")).all().get();
      ConsumerGroupDescription sink = described.get("millrace-sink");
      int partitions =
          admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic).partitions().size();
      System.out.printf(
          "{\"keys\": [%s], \"before\": %d, \"end\": %d, \"groups\": [%s], \"members\": %d, "
              + "\"partitions\": %d}%n",
          keys.stream().map(key -> '"' + key + '"').collect(Collectors.joining(",")),
          atTime,
          atEnd,
          groups.stream().map(group -> '"' + group + '"').collect(Collectors.joining(",")),
          sink.members().size(),
          partitions);
    }
  }
}
