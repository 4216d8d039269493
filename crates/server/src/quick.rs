//! `gale serve`: a directory on the spot. Behind it is an ordinary configuration,
//! which `--print-config` shows.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

use gale_config::quote;
use gale_engine::serve::Server;
use gale_modules::order::ORDER;
use gale_process::BuildRequest;

use crate::arguments::Serve;

/// Media types that a directory of web pages needs.
const MIME_TYPES: &str = include_str!("mime.types");

/// Serves a directory until it is stopped.
pub fn serve(serve: &Serve) -> ExitCode {
    let text = configuration(serve);
    if serve.prints_configuration {
        // Whoever reads may have seen enough.
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
    let announce =
        move |address: String| eprintln!("gale: serving {directory} at http://{address}/ (stop with Ctrl-C)");
    gale_process::start(Server::new(&ORDER).announcing(announce), request)
}

fn configuration(serve: &Serve) -> String {
    let quoted = |text: &[u8]| quote(text).to_string();
    let directory = quoted(serve.directory.as_os_str().as_bytes());
    // A process number's own file: several may serve at the same time.
    let pid = std::env::temp_dir().join(format!("gale-serve-{}.pid", std::process::id()));
    let pid = quoted(pid.as_os_str().as_bytes());
    // Whoever starts it is who may read the directory: without this line, root's would be served as nobody.
    let user = if gale_process::is_super_user() { "user root;\n" } else { "" };
    let listen = &serve.listen;
    format!(
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
        listen {listen};
        root {directory};
        index index.html;
    }}
}}
",
        types = MIME_TYPES.trim_end().replace('\n', "\n    "),
    )
}
