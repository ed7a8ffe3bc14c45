"""HTTP/1.1 of every port: heads, connections, the server, compressed bodies."""
