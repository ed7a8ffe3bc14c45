"""The store's HTTP interface and the answers to saved queries."""
