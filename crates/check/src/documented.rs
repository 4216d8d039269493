//! Directives that nginx documents, but whose code is not part of its open-source distribution: those of the commercial
//! edition and of separately built modules. Directives inside of the blocks of these modules are not checked one by one
//! and not listed. <https://nginx.org/en/docs/dirindex.html>

use std::fmt;

/// Edition or module that implements a directive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// nginx's commercial edition.
    Commercial,
    /// A separately built module with this name.
    Module(&'static str),
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Commercial => f.write_str("of nginx's commercial edition"),
            Owner::Module(name) => write!(f, "of the module {name}, which is not part of nginx's source"),
        }
    }
}

/// Returns the owner of a directive that is not part of nginx's source.
pub fn owner(name: &str) -> Option<Owner> {
    ROWS.iter().find(|row| row.directives.contains(&name)).map(|row| row.owner)
}

/// The directives of one or several modules.
struct Row {
    owner: Owner,
    directives: &'static [&'static str],
}

const fn commercial(directives: &'static [&'static str]) -> Row {
    Row { owner: Owner::Commercial, directives }
}

const ROWS: &[Row] = &[
    // ngx_http_api_module, and ngx_http_status_module and ngx_http_upstream_conf_module before it
    commercial(&["api", "status", "status_format", "status_zone", "upstream_conf"]),
    // ngx_http_auth_jwt_module, ngx_http_auth_require_module
    commercial(&[
        "auth_jwt",
        "auth_jwt_claim_set",
        "auth_jwt_header_set",
        "auth_jwt_key_cache",
        "auth_jwt_key_file",
        "auth_jwt_key_request",
        "auth_jwt_leeway",
        "auth_jwt_require",
        "auth_jwt_type",
        "auth_require",
    ]),
    // ngx_http_f4f_module, ngx_http_hls_module
    commercial(&[
        "f4f",
        "f4f_buffer_size",
        "hls",
        "hls_buffers",
        "hls_forward_args",
        "hls_fragment",
        "hls_mp4_buffer_size",
        "hls_mp4_max_buffer_size",
    ]),
    // ngx_http_internal_redirect_module, ngx_http_keyval_module, ngx_stream_keyval_module, ngx_http_num_map_module
    commercial(&["internal_redirect", "keyval", "keyval_zone", "num_map"]),
    // ngx_http_mp4_module
    commercial(&["mp4_limit_rate", "mp4_limit_rate_after"]),
    // ngx_http_session_log_module
    commercial(&["session_log", "session_log_format", "session_log_zone"]),
    // ngx_http_oidc_module
    Row { owner: Owner::Commercial, directives: &["auth_oidc", "oidc_provider"] },
    // ngx_http_upstream_module, ngx_stream_upstream_module
    commercial(&["least_time", "ntlm", "queue", "state", "sticky", "sticky_cookie_insert"]),
    // ngx_http_upstream_hc_module, ngx_stream_upstream_hc_module
    Row { owner: Owner::Commercial, directives: &["health_check", "health_check_timeout", "match"] },
    // ngx_http_proxy_module and the other modules that pass requests to servers; ngx_stream_proxy_module
    commercial(&[
        "fastcgi_cache_purge",
        "fastcgi_request_dynamic",
        "grpc_request_dynamic",
        "grpc_ssl_key_log",
        "proxy_cache_purge",
        "proxy_request_dynamic",
        "proxy_session_drop",
        "proxy_ssl_key_log",
        "scgi_cache_purge",
        "scgi_request_dynamic",
        "uwsgi_cache_purge",
        "uwsgi_request_dynamic",
        "uwsgi_ssl_key_log",
    ]),
    // ngx_core_module, ngx_http_core_module, ngx_http_ssl_module, ngx_stream_ssl_module
    commercial(&["error_log_tag", "ssl_key_log", "stall_threshold"]),
    // ngx_mgmt_module
    Row {
        owner: Owner::Commercial,
        directives: &["deployment_context", "enforce_initial_report", "license_token", "mgmt", "usage_report"],
    },
    // ngx_stream_mqtt_filter_module, ngx_stream_mqtt_preread_module
    commercial(&["mqtt", "mqtt_buffers", "mqtt_preread", "mqtt_rewrite_buffer_size", "mqtt_set_connect"]),
    // ngx_stream_zone_sync_module
    commercial(&[
        "zone_sync",
        "zone_sync_buffers",
        "zone_sync_connect_retry_interval",
        "zone_sync_connect_timeout",
        "zone_sync_interval",
        "zone_sync_recv_buffer_size",
        "zone_sync_server",
        "zone_sync_ssl",
        "zone_sync_ssl_certificate",
        "zone_sync_ssl_certificate_key",
        "zone_sync_ssl_ciphers",
        "zone_sync_ssl_conf_command",
        "zone_sync_ssl_crl",
        "zone_sync_ssl_name",
        "zone_sync_ssl_password_file",
        "zone_sync_ssl_protocols",
        "zone_sync_ssl_server_name",
        "zone_sync_ssl_trusted_certificate",
        "zone_sync_ssl_verify",
        "zone_sync_ssl_verify_depth",
        "zone_sync_timeout",
    ]),
    // ngx_http_js_module, ngx_stream_js_module
    Row {
        owner: Owner::Module("njs"),
        directives: &[
            "js_access",
            "js_body_filter",
            "js_content",
            "js_context_reuse",
            "js_context_reuse_max_size",
            "js_engine",
            "js_fetch_buffer_size",
            "js_fetch_ciphers",
            "js_fetch_keepalive",
            "js_fetch_keepalive_requests",
            "js_fetch_keepalive_time",
            "js_fetch_keepalive_timeout",
            "js_fetch_max_response_buffer_size",
            "js_fetch_protocols",
            "js_fetch_proxy",
            "js_fetch_timeout",
            "js_fetch_trusted_certificate",
            "js_fetch_verify",
            "js_fetch_verify_depth",
            "js_filter",
            "js_header_filter",
            "js_import",
            "js_include",
            "js_load_http_native_module",
            "js_load_stream_native_module",
            "js_path",
            "js_periodic",
            "js_preload_object",
            "js_preread",
            "js_set",
            "js_shared_dict_zone",
            "js_var",
        ],
    },
    // ngx_otel_module
    Row {
        owner: Owner::Module("otel"),
        directives: &[
            "otel_exporter",
            "otel_resource_attr",
            "otel_service_name",
            "otel_span_attr",
            "otel_span_name",
            "otel_trace",
            "otel_trace_context",
        ],
    },
    // ngx_http_acme_module
    Row { owner: Owner::Module("acme"), directives: &["acme_certificate", "acme_issuer", "acme_shared_zone"] },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_has_one_owner_and_each_owner_has_words() {
        let mut names: Vec<&str> = ROWS.iter().flat_map(|row| row.directives).copied().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(owner("keyval"), Some(Owner::Commercial));
        assert_eq!(owner("js_set"), Some(Owner::Module("njs")));
        assert_eq!((owner("proxy_pass"), owner("lua_code_cache")), (None, None));
    }
}
