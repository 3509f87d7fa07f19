"""The router: which worker gets a request. Knows no engine, no socket and no clock."""
