//! Kinds of zones whose counters a configuration keeps by name. Readers ask for a kind with
//! [`NamedZones::figures_of`](gale_engine::zone::NamedZones::figures_of).

/// `status_zone` of a server: [`ServerZone`](gale_worker::traffic::ServerZone).
pub const HTTP_SERVERS: &str = "http server";

/// `status_zone` of a location: [`Traffic`](gale_worker::traffic::Traffic).
pub const HTTP_LOCATIONS: &str = "http location";

/// `status_zone` of a server of stream: [`ServerZone`](gale_worker::traffic::ServerZone).
pub const STREAM_SERVERS: &str = "stream server";

/// `limit_conn_zone`: [`limit_conn::Verdicts`](super::limit_conn::Verdicts).
pub const HTTP_LIMIT_CONNS: &str = "http limit_conn";

/// `limit_conn_zone` of stream: [`limit_conn::Verdicts`](super::limit_conn::Verdicts).
pub const STREAM_LIMIT_CONNS: &str = "stream limit_conn";

/// `limit_req_zone`: [`limit_req::Verdicts`](super::limit_req::Verdicts).
pub const HTTP_LIMIT_REQS: &str = "http limit_req";

/// `limit_session_zone`: [`limit_req::Verdicts`](super::limit_req::Verdicts).
pub const STREAM_LIMIT_SESSIONS: &str = "stream limit_session";
