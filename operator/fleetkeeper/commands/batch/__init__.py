"""`fleetkeeper batch`: submit files of requests to OpenAI's Batch API, watch them, and fetch their results.

`commands` are the commands, `server` asks the server, `input_file` checks a file before it is sent,
`progress` draws and waits, `results` writes what came back.
"""
