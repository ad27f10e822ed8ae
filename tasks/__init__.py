"""Tasks: the steps of a checkpoint as Prefect tasks (`steps`), and what they and flows share (`common`, `ending`)."""
