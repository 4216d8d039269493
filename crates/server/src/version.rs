//! Version strings and default paths.
//!
//! Under the name `nginx` the strings have nginx's form, because certbot and other programs read the version and look
//! for `--with-` and `--without-` flags.

/// The version of nginx whose configuration language and behaviour Gale follows.
const NGINX_VERSION: &str = "1.31.5";

/// Modules that are optional in nginx's `configure`, and always present in Gale.
const WITH: &[&str] = &[
    "http_addition_module",
    "http_auth_request_module",
    "http_dav_module",
    "http_flv_module",
    "http_geoip_module",
    "http_gunzip_module",
    "http_gzip_static_module",
    "http_mp4_module",
    "http_random_index_module",
    "http_realip_module",
    "http_secure_link_module",
    "http_slice_module",
    "http_ssl_module",
    "http_stub_status_module",
    "http_sub_module",
    "http_v2_module",
    "stream",
    "stream_geoip_module",
    "stream_realip_module",
    "stream_ssl_module",
    "stream_ssl_preread_module",
    "file-aio",
    "threads",
];

/// `-v`
pub fn short(is_nginx: bool) -> String {
    if is_nginx {
        format!("nginx version: nginx/{NGINX_VERSION} (gale/{})", env!("CARGO_PKG_VERSION"))
    } else {
        format!("gale version: gale/{}", env!("CARGO_PKG_VERSION"))
    }
}

/// TLS library shown by `-V`, for programs that derive from it the directives they may write. It is nginx's text for
/// AWS-LC, the library that Gale uses.
const COMPATIBLE_WITH: &str = "OpenSSL 1.1.1 (compatible; AWS-LC)";

/// `-V`
pub fn long(is_nginx: bool) -> String {
    let with: Vec<String> = WITH.iter().map(|module| format!("--with-{module}")).collect();
    format!(
        "{}\nbuilt with {COMPATIBLE_WITH}\nTLS SNI support enabled\nsandbox: {}\n\
         configure arguments: --prefix={} --conf-path={} --error-log-path={} --pid-path={} {}\n",
        short(is_nginx),
        gale_process::sandbox_support(),
        prefix(is_nginx),
        configuration_path(is_nginx),
        error_log_path(is_nginx),
        pid_path(is_nginx),
        with.join(" "),
    )
}

/// Directory against which relative paths are resolved, as in Debian's packages.
pub fn prefix(is_nginx: bool) -> &'static str {
    if is_nginx { "/usr/share/nginx" } else { "/usr/share/gale" }
}

/// Default path of the configuration file.
pub fn configuration_path(is_nginx: bool) -> &'static str {
    if is_nginx { "/etc/nginx/nginx.conf" } else { "/etc/gale/gale.conf" }
}

/// Default path of the error log.
pub fn error_log_path(is_nginx: bool) -> &'static str {
    if is_nginx { "/var/log/nginx/error.log" } else { "/var/log/gale/error.log" }
}

fn pid_path(is_nginx: bool) -> &'static str {
    if is_nginx { "/run/nginx.pid" } else { "/run/gale.pid" }
}
