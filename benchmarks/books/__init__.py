"""Whether all figures of one load are the same wherever they are told."""
