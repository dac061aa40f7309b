"""Sinks of events for other programs: Prometheus, OpenTelemetry, and trace viewers."""
