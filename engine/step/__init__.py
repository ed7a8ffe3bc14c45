"""The step loop: sequences become a batch, the batch is computed, and tokens come out."""
