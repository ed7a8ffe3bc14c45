"""HTTP interface of the store, and answers to saved queries."""
