"""Which sequences the next step computes, and how many tokens of each."""
