//! map: a request variable whose value depends on another variable. See [`shared::map`](crate::shared::map).
//!   map STRING $VARIABLE { ... }          http
//! (<https://nginx.org/en/docs/http/ngx_http_map_module.html>)

use gale_config::Contexts;
use gale_engine::module::Module;
use gale_http::request::Request;

use crate::shared::map;

/// See the file's head.
pub static MODULE: Module =
    Module { name: "http_map", directives: &[map::directive::<Request>(Contexts::HTTP)], ..Module::EMPTY };
