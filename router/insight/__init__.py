"""What a router tells those who look: numbers, traces, the live page, audits."""
