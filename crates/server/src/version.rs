//! Who the program says it is, and where it keeps its files.
//!
//! Under the name `nginx` the answers have nginx's form, because certbot and
//! others read the version and look for `--with-` and `--without-` flags.

/// The version of nginx whose language and behaviour Gale follows.
const NGINX_VERSION: &str = "1.31.5";

/// What nginx has only if its `configure` is asked for it, and Gale always.
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

/// For programs that read this to learn which directives they may write: what nginx says with AWS-LC, which is what
/// Gale computes with.
const COMPATIBLE_WITH: &str = "OpenSSL 1.1.1 (compatible; AWS-LC)";

/// `-V`
pub fn long(is_nginx: bool) -> String {
    let with: Vec<String> = WITH.iter().map(|module| format!("--with-{module}")).collect();
    format!(
        "{}\nbuilt with {COMPATIBLE_WITH}\nTLS SNI support enabled\nsandbox: {}\nconfigure arguments: --prefix={} --conf-path={} --error-log-path={} --pid-path={} {}\n",
        short(is_nginx),
        gale_process::sandbox_support(),
        prefix(is_nginx),
        configuration_path(is_nginx),
        error_log_path(is_nginx),
        pid_path(is_nginx),
        with.join(" "),
    )
}

/// The parent of relative paths: Debian's places.
pub fn prefix(is_nginx: bool) -> &'static str {
    if is_nginx { "/usr/share/nginx" } else { "/usr/share/gale" }
}

/// The configuration file.
pub fn configuration_path(is_nginx: bool) -> &'static str {
    if is_nginx { "/etc/nginx/nginx.conf" } else { "/etc/gale/gale.conf" }
}

/// The error log before the configuration says otherwise.
pub fn error_log_path(is_nginx: bool) -> &'static str {
    if is_nginx { "/var/log/nginx/error.log" } else { "/var/log/gale/error.log" }
}

fn pid_path(is_nginx: bool) -> &'static str {
    if is_nginx { "/run/nginx.pid" } else { "/run/gale.pid" }
}
