"""One model: its jobs placed, sent, watched, moved and brought to their end."""
