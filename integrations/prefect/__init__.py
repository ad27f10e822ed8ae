"""Prefect: deployments, work pools and automations of a server, brought to what files say."""
