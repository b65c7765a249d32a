"""What a deployment withstands: faults, attacks, load."""
