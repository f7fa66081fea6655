"""The main job: a spoken conversation with the embedded default, over a real websocket, on this machine."""
