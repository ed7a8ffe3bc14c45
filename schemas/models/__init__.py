"""What is served under a name: adapters, versions and how traffic moves among them."""
