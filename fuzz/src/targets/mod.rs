//! The targets, a file each.

use crate::Target;

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(mod $name;)*
        pub(crate) const ALL: &[Target] = &[$(Target { name: stringify!($name), run: $name::run }),*];
    };
}

targets!(
    acme_answer,
    api_body,
    cache_file,
    chunks,
    client_hello,
    configuration,
    configuration_to_request,
    control_socket,
    dns_answer,
    fastcgi,
    geo,
    http1_request,
    http1_response,
    http2_client,
    http2_connection,
    http2_frames,
    http2_hpack,
    map,
    memcached,
    mp4,
    ocsp_response,
    proxy_protocol,
    ranges,
    ssi,
    syslog,
    tls_records,
    top_figures,
    uri,
);
