"""The secure aggregation protocol: messages, sessions and unmasking."""
