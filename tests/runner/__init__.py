"""Runner of the test suite: choice of tests, order, measured costs and reruns."""
