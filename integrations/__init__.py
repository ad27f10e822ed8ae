"""Integrations: everything that knows an outside system, each module imported only when it is asked for."""
