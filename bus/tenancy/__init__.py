"""What tenants and their API keys may use, as whoever lets requests in counts it: in Redis."""
