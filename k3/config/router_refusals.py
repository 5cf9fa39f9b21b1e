"""What the router refuses at start-up: rules as in `refusals.py`, which judges them."""

from __future__ import annotations

from k3.config.api_keys import unusable_keys
from k3.config.rule import (
    Rule,
    bad_addresses,
    is_same_port,
    missing_model,
    repeated,
    unusable_tls,
)
from k3.config.tree import RouterConfig
from k3.ports import ADDRESS

ROUTER = ("router",)
LOOPBACK = ("127.0.0.1", "::1", "[::1]", "localhost")

ROUTER_RULES: tuple[Rule[RouterConfig], ...] = (
    Rule(
        "ROUTER_MODEL_FOLDER",
        ROUTER,
        ("model.path",),
        "model.path has no config.json",
        "the router needs the tokenizer and the chat format of the model",
        "point model.path at the model folder, or leave it empty for the embedded model",
        lambda c: missing_model(c.model),
    ),
    Rule(
        "ROUTER_SAME_PORT",
        ROUTER,
        ("http.port", "http.admin_port"),
        "http.port = http.admin_port on one address",
        "two servers cannot share a port",
        "choose another http.admin_port",
        lambda c: is_same_port((c.http.host, c.http.port), (c.http.admin_host, c.http.admin_port)),
    ),
    Rule(
        "KEY_FILES",
        ROUTER,
        ("http.api_key_file", "http.admin_key_file"),
        "a key file cannot be read, is empty, or holds a key of under 16 characters, with blanks or not ASCII",
        "a server that was to ask for keys must not start without them",
        "give a file with one key a line, or remove the setting",
        lambda c: unusable_keys(c.http.api_key_file) or unusable_keys(c.http.admin_key_file),
    ),
    Rule(
        "ADMIN_OPEN",
        ROUTER,
        ("http.admin_host", "http.admin_key_file"),
        "http.admin_host is not a loopback address and there is no http.admin_key_file",
        "whoever reaches the admin API can drain instances and end requests",
        "set http.admin_key_file, or http.admin_host=127.0.0.1",
        lambda c: c.http.admin_host not in LOOPBACK and not c.http.admin_key_file,
    ),
    Rule(
        "METRICS_AUTH",
        ROUTER,
        ("http.metrics_auth", "http.api_key_file"),
        "http.metrics_auth without http.api_key_file",
        "there is no key to ask for",
        "set http.api_key_file, or http.metrics_auth=false",
        lambda c: c.http.metrics_auth and not c.http.api_key_file,
    ),
    Rule(
        "FLEET_ADDRESSES",
        ROUTER,
        ("fleet.prefills", "fleet.decodes"),
        "an instance address is not host:port with a port from 1 to 65535",
        "the router cannot dial it",
        "write host:port; an IPv6 host in brackets",
        lambda c: bad_addresses((*c.fleet.prefills, *c.fleet.decodes), ADDRESS),
    ),
    Rule(
        "FLEET_TWICE",
        ROUTER,
        ("fleet.prefills", "fleet.decodes"),
        "an address appears twice in fleet.prefills and fleet.decodes",
        "an instance has one role and one entry",
        "name every instance once",
        lambda c: repeated((*c.fleet.prefills, *c.fleet.decodes)),
    ),
    Rule(
        "FLEET_TLS_PAIR",
        ROUTER,
        ("fleet.tls_cert", "fleet.tls_key"),
        "only one of fleet.tls_cert and fleet.tls_key is set",
        "a certificate is useless without its key",
        "set both or neither",
        lambda c: bool(c.fleet.tls_cert) != bool(c.fleet.tls_key),
    ),
    Rule(
        "FLEET_TLS_CA",
        ROUTER,
        ("fleet.tls_cert", "fleet.tls_ca"),
        "fleet.tls_cert without fleet.tls_ca",
        "without authorities the channels use no TLS and the certificate would never be shown",
        "set fleet.tls_ca as well",
        lambda c: bool(c.fleet.tls_cert) and not c.fleet.tls_ca,
    ),
    Rule(
        "FLEET_TLS_FILES",
        ROUTER,
        ("fleet.tls_ca", "fleet.tls_cert", "fleet.tls_key"),
        "a TLS file does not exist, or certificate and key do not belong together",
        "the channels could not use TLS",
        "give PEM files without a passphrase, or remove the setting",
        lambda c: unusable_tls(c, "fleet"),
    ),
)
