//! `$realpath_root`: the directory of `root` or `alias` with symbolic links resolved.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#var_realpath_root>)
//!
//! The kernel can usually resolve the path from its cache. If not, a thread of the pool does so after the rewrites of
//! the location; where the variable is used earlier and would have to wait, it has no value. A configuration that does
//! not use the variable pays nothing.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_config::Diagnostic;
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Module};
use gale_files as files;
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::files::directory_of;
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_http::variables::Variable;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_realpath_root",
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[Variable::named("realpath_root", |request, _, out| append(request, out))],
        handlers: &[(
            Phase::PreAccess,
            &Wait { applies: |conf: &Conf| conf.is_mentioned, first: at_once, then: |request, _| find(request) },
        )],
        ..HttpPart::EMPTY
    }],
    ..Module::EMPTY
};

#[derive(Default)]
struct Conf {
    is_mentioned: bool,
}

fn merge(conf: &mut dyn std::any::Any, _: Option<&dyn std::any::Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("the settings of this module");
    conf.is_mentioned = builder.http_mut().variables.table.is_mentioned(b"realpath_root");
    Ok(())
}

/// A resolved directory.
struct Known {
    directory: PathBuf,
    real: PathBuf,
}

fn directory(request: &Request) -> PathBuf {
    let mut directory = Vec::with_capacity(128);
    // On failure the path is empty, and no such path exists.
    let _ = directory_of(request, &mut directory);
    PathBuf::from(OsString::from_vec(directory))
}

/// Resolves the path from the kernel's cache and keeps it: later it may have left the cache.
fn at_once(request: &mut Request, _: &Conf) -> Option<Flow> {
    let directory = directory(request);
    if let Ok(real) = files::try_real_path(&directory)? {
        request.notes.put(Known { directory, real });
    }
    Some(Flow::Next)
}

fn find(request: &mut Request) -> LocalBoxFuture<'_, Flow> {
    Box::pin(async move {
        let directory = directory(request);
        match files::real_path(&directory).await {
            Ok(real) => request.notes.put(Known { directory, real }),
            Err(error) => complain(request, &directory, &error),
        }
        Flow::Next
    })
}

fn append(request: &Request, out: &mut Vec<u8>) -> bool {
    let directory = directory(request);
    if let Some(known) = request.notes.get::<Known>().filter(|known| known.directory == directory) {
        out.extend_from_slice(known.real.as_os_str().as_encoded_bytes());
        return true;
    }
    match files::try_real_path(&directory) {
        Some(Ok(real)) => {
            out.extend_from_slice(real.as_os_str().as_encoded_bytes());
            true
        }
        Some(Err(error)) => {
            complain(request, &directory, &error);
            false
        }
        None => false,
    }
}

fn complain(request: &Request, directory: &Path, error: &io::Error) {
    let directory = directory.display();
    request.log(Level::Crit, format_args!("realpath() \"{directory}\" failed {}", OsErrorText(error)));
}
