"""The status page: what the cluster does now, drawn for people; docs/status-page.md."""
