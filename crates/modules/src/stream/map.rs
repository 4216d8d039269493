//! map: a session variable whose value depends on another variable. See [`shared::map`](crate::shared::map).
//!   map STRING $VARIABLE { ... }          stream
//! (<https://nginx.org/en/docs/stream/ngx_stream_map_module.html>)

use gale_config::Contexts;
use gale_engine::module::Module;
use gale_stream::session::Session;

use crate::shared::map;

/// See the file's head.
pub static MODULE: Module =
    Module { name: "stream_map", directives: &[map::directive::<Session>(Contexts::STREAM)], ..Module::EMPTY };
