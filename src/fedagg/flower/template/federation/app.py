"""What Flower starts: the server and the client."""

from fedagg.flower import client_app, server_app
from federation.task import data, model

server = server_app(model)
client = client_app(model, data)
