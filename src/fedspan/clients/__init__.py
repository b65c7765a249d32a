"""The client half of a round: the host, client stores, and the client half of secure aggregation."""
