"""Every message and record that crosses a process boundary, as msgspec Structs. No I/O here."""
