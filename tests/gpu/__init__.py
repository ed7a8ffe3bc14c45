"""What runs on a CUDA device alone: `make test-gpu`."""
