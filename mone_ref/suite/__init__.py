"""The conformance suite: clauses, cases, comparison, verdict, report."""
