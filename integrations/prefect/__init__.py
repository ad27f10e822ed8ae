"""Prefect: create and update the deployments, work pools and automations of a server from files."""
