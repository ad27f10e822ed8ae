"""The attack on wherry: hostile files for every container, and what each verb does with them."""
