"""Jobs on their way through the queue: decoded, refused, ended, and word of them."""
