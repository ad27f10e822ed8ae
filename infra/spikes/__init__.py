"""Spikes: small programs that try a design before it is carried out; each ends in a decision."""
