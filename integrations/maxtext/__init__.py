"""What makes an Orbax checkpoint MaxText's: its tree, its step folder, and whether its layers are scanned."""
