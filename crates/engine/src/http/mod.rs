//! HTTP above the codecs: the request, its way through the phases, and the
//! response. Nothing in here but `http1` knows how a version is spoken; which
//! one it is, a request says to whom it matters (`Request::version`).

pub mod body;
pub mod browser;
pub mod builder;
pub mod configuration;
pub mod delivery;
pub mod error_page;
pub mod exchange;
pub mod file_reader;
pub mod files;
pub mod filters;
pub mod forwarded;
pub mod http1;
pub mod limit_rate;
pub mod location;
pub mod media_types;
pub mod module;
pub mod open_files;
pub mod phases;
pub mod pipeline;
pub mod regex;
pub mod request;
pub mod request_body;
pub mod response;
pub mod room;
pub mod server_name;
pub mod settings;
pub mod subrequest;
pub mod template;
pub mod thread_pool;
pub mod transform;
pub mod variables;
pub mod worker;
