//! `gale serve`: serves a directory without a configuration file. It generates an ordinary configuration, which
//! `--print-config` shows.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

use gale_config::quote;
use gale_engine::serve::Server;
use gale_modules::order::ORDER;
use gale_process::BuildRequest;
use gale_process::hostname;

use crate::arguments::Serve;

const MIME_TYPES: &str = include_str!("mime.types");

/// Serves a directory until it is stopped.
pub fn serve(serve: &Serve) -> ExitCode {
    let text = match configuration(serve) {
        Ok(text) => text,
        Err(error) => {
            eprintln!("gale: [emerg] a certificate cannot be created: {error}");
            return ExitCode::FAILURE;
        }
    };
    if serve.prints_configuration {
        // Output errors are ignored: the reader may close the pipe early.
        let _ = std::io::stdout().write_all(text.as_bytes());
        return ExitCode::SUCCESS;
    }
    if !serve.directory.is_dir() {
        eprintln!("gale: [emerg] \"{}\" is not a directory", serve.directory.display());
        return ExitCode::FAILURE;
    }
    let request = BuildRequest {
        program: "gale".to_owned(),
        configuration_path: PathBuf::from("/etc/gale/gale.conf"),
        prefix: serve.directory.clone(),
        error_log_path: Some(PathBuf::from("stderr")),
        privileged: gale_process::is_super_user(),
        configuration_text: Some(text),
        ..BuildRequest::default()
    };
    let directory = serve.directory.display().to_string();
    let scheme = if serve.tls { "https" } else { "http" };
    let has_dashboard = serve.has_dashboard;
    let announce = move |address: String| {
        eprintln!("gale: serving {directory} at {scheme}://{address}/ (stop with Ctrl-C)");
        if has_dashboard {
            eprintln!("gale: the dashboard is at {scheme}://{address}/dashboard/, only for this machine");
        }
    };
    gale_process::start(Server::new(&ORDER).announcing(announce), request)
}

/// Creates a self-signed certificate for this machine's names, and its key. Browsers warn about it, but allow the user
/// to proceed.
fn own_certificate() -> Result<(String, String), rcgen::Error> {
    let mut names = vec!["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
    let host = String::from_utf8_lossy(hostname()).into_owned();
    if !host.is_empty() && host != "localhost" {
        names.push(host);
    }
    let made = rcgen::generate_simple_self_signed(names)?;
    Ok((made.cert.pem(), made.signing_key.serialize_pem()))
}

/// The dashboard, and a status zone so that it shows the requests served. Only clients on this machine may access it,
/// whatever address the server listens on.
const DASHBOARD: &str = "        status_zone site;

        location /dashboard/ {
            # Protects against DNS rebinding.
            if ($host !~* \"^(localhost|[0-9.]+|\\[[0-9a-f:]+\\])$\") {
                return 403;
            }
            dashboard;
            allow 127.0.0.0/8;
            allow ::1;
            allow unix:;
            deny all;
        }
";

fn configuration(serve: &Serve) -> Result<String, rcgen::Error> {
    let quoted = |text: &[u8]| quote(text).to_string();
    let directory = quoted(serve.directory.as_os_str().as_bytes());
    // Each process has its own pid file, since several may run at the same time.
    let pid = std::env::temp_dir().join(format!("gale-serve-{}.pid", std::process::id()));
    let pid = quoted(pid.as_os_str().as_bytes());
    // The workers run as the user that starts the program, who may read the directory. Without this line, root's home
    // directory would be served by the unprivileged worker.
    let user = if gale_process::is_super_user() { "user root;\n" } else { "" };
    let listen = &serve.listen;
    let (ssl, certificate) = match serve.tls {
        false => ("", String::new()),
        true => {
            let (certificate, key) = own_certificate()?;
            let lines = [("ssl_certificate", certificate), ("ssl_certificate_key", key)];
            let lines =
                lines.map(|(name, text)| format!("        {name} {};\n", quoted(format!("data:{text}").as_bytes())));
            (" ssl", lines.concat())
        }
    };
    Ok(format!(
        "{user}daemon off;
worker_processes auto;
error_log stderr notice;
pid {pid};

events {{
    worker_connections 4096;
}}

http {{
    {types}
    default_type application/octet-stream;
    access_log off;
    sendfile on;
    server_tokens off;

    server {{
        listen {listen}{ssl};
{certificate}        root {directory};
        index index.html;
{dashboard}    }}
}}
",
        dashboard = if serve.has_dashboard { DASHBOARD } else { "" },
        types = MIME_TYPES.trim_end().replace('\n', "\n    "),
    ))
}
