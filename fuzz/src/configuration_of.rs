//! Builds a configuration that includes fuzzed rows, like the program, but opens no socket or file.

use gale_config::MemoryFiles;
use gale_engine::configuration::main_settings;
use gale_modules::order::ORDER;
use gale_process::BuildRequest;

/// `text` is the content of the http block; `data` is the file that it includes.
pub fn build(text: &str, data: &[u8]) {
    let request = BuildRequest {
        program: "gale".to_owned(),
        prefix: "/".into(),
        configuration_path: "/gale.conf".into(),
        configuration_text: Some(format!("events {{ }} http {{ {text} }}")),
        ..BuildRequest::default()
    };
    let mut files = MemoryFiles::new().with("/data", data.to_vec());
    if let Err(report) = main_settings(&ORDER, &request, &mut files) {
        assert!(!report.render("gale").is_empty());
    }
}
