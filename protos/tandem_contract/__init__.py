"""What two programs must agree on, written once. The programs share this folder's parent, `protos`, and nothing else.

What the client imports needs the standard library alone. A module that needs more says so in its first line, and
`import tandem_client` never loads it.
"""
