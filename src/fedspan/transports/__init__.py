"""Transports: delivery of orders to hosts and of their replies to the server."""
