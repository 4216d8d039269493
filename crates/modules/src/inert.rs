//! inert: directives of nginx that are accepted with a warning and do nothing.
//! (<https://nginx.org/en/docs/dirindex.html>)
//!
//! Only directives that cannot change the meaning of a response: sizes of hash tables that Gale does not have, and
//! optimisations. Never access rules, limits or header fields. A row leaves this list when its module is built.

use gale_config::{Body, Contexts, Inert, Takes};
use gale_engine::module::{Directive, Module};

/// See the file's head.
pub static MODULE: Module = Module { name: "inert", directives: DIRECTIVES, ..Module::EMPTY };

const HTTP_AND_SERVER: Contexts = Contexts::HTTP.or(Contexts::SERVER);
const SERVER_AND_LOCATION: Contexts = Contexts::SERVER.or(Contexts::LOCATION);

const fn row(name: &'static str, contexts: Contexts, takes: Takes, about: &'static str) -> Directive {
    Directive { name, contexts, takes, body: Body::None, default: "", about, store: &Inert }
}

const HASH: &str = "No effect: hash tables grow by themselves.";
const MEMORY: &str = "No effect: there are no memory pools.";
const COMPRESSION: &str = "No effect: the compressor chooses the size of its buffers itself.";
const BUFFERS: &str = "No effect: there are no recycled buffers.";
const TEMPORARY: &str = "No effect: threads always write temporary files.";

const OBJECTS: &str = "No effect: a reload reads all certificates again.";

const DIRECTIVES: &[Directive] = &[
    row("ssl_object_cache_inheritable", Contexts::MAIN, Takes::Flag, OBJECTS),
    row("variables_hash_max_size", Contexts::STREAM, Takes::Exactly(1), HASH),
    row("variables_hash_bucket_size", Contexts::STREAM, Takes::Exactly(1), HASH),
    row("server_names_hash_max_size", Contexts::STREAM, Takes::Exactly(1), HASH),
    row("server_names_hash_bucket_size", Contexts::STREAM, Takes::Exactly(1), HASH),
    row("map_hash_max_size", Contexts::STREAM, Takes::Exactly(1), HASH),
    row("map_hash_bucket_size", Contexts::STREAM, Takes::Exactly(1), HASH),
    row("types_hash_max_size", Contexts::ANYWHERE, Takes::Exactly(1), HASH),
    row("types_hash_bucket_size", Contexts::ANYWHERE, Takes::Exactly(1), HASH),
    row("server_names_hash_max_size", Contexts::HTTP, Takes::Exactly(1), HASH),
    row("server_names_hash_bucket_size", Contexts::HTTP, Takes::Exactly(1), HASH),
    row("variables_hash_max_size", Contexts::HTTP, Takes::Exactly(1), HASH),
    row("variables_hash_bucket_size", Contexts::HTTP, Takes::Exactly(1), HASH),
    row("map_hash_max_size", Contexts::HTTP, Takes::Exactly(1), HASH),
    row("map_hash_bucket_size", Contexts::HTTP, Takes::Exactly(1), HASH),
    row("proxy_headers_hash_max_size", Contexts::ANYWHERE, Takes::Exactly(1), HASH),
    row("proxy_headers_hash_bucket_size", Contexts::ANYWHERE, Takes::Exactly(1), HASH),
    row("referer_hash_max_size", SERVER_AND_LOCATION, Takes::Exactly(1), HASH),
    row("referer_hash_bucket_size", SERVER_AND_LOCATION, Takes::Exactly(1), HASH),
    row("connection_pool_size", HTTP_AND_SERVER, Takes::Exactly(1), MEMORY),
    row("request_pool_size", HTTP_AND_SERVER, Takes::Exactly(1), MEMORY),
    row("aio_write", Contexts::ANYWHERE, Takes::Flag, TEMPORARY),
    row("gzip_hash", Contexts::ANYWHERE, Takes::Exactly(1), COMPRESSION),
    row("gzip_no_buffer", Contexts::ANYWHERE, Takes::Flag, COMPRESSION),
    row("gzip_window", Contexts::ANYWHERE, Takes::Exactly(1), COMPRESSION),
    row("postpone_gzipping", Contexts::ANYWHERE, Takes::Exactly(1), COMPRESSION),
    row("ssi_ignore_recycled_buffers", Contexts::ANYWHERE, Takes::Flag, BUFFERS),
];
