"""What the formats that rest on Orbax share: its files, its tree metadata, its reader and its writer."""
