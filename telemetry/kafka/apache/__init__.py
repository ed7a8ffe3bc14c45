"""Apache Kafka on this machine: its Java, its jars, and one broker in KRaft mode."""
