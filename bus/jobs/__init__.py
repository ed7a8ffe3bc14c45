"""Jobs in the queue: decoding, refusals, ends, and announcements."""
