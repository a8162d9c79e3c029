"""Grafana's boards as code: `make boards` writes deploy/grafana/boards from what is here."""
