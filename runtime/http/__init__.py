"""HTTP/1.1 as every port takes it: heads, connections, the server, compressed bodies."""
