"""The server half of a round: sampling, orders and replies, validation, aggregation and evaluation."""
