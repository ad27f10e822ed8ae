PRAGMA user_version = 2;
BEGIN TRANSACTION;
CREATE TABLE checkpoint (
	checkpoint_digest VARCHAR(64) NOT NULL, 
	weights_digest VARCHAR(64) NOT NULL, 
	format VARCHAR NOT NULL, 
	format_version VARCHAR, 
	kind VARCHAR NOT NULL, 
	step BIGINT, 
	tensors BIGINT NOT NULL, 
	parameters BIGINT NOT NULL, 
	nbytes BIGINT NOT NULL, 
	PRIMARY KEY (checkpoint_digest)
);
INSERT INTO "checkpoint" VALUES('9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d','69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','t5x',NULL,'params',100,2,17,68);
INSERT INTO "checkpoint" VALUES('6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','orbax',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','huggingface',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244','897bcc836c3cc5bc21fda78ba17299c2f433904f1b5fc178ea8681b522911b7d','dcp',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49','69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','t5x',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','huggingface',NULL,'params',NULL,2,17,68);
CREATE TABLE conversion (
	statement INTEGER NOT NULL, 
	source VARCHAR(64) NOT NULL, 
	source_uri VARCHAR NOT NULL, 
	source_fingerprint VARCHAR NOT NULL, 
	target VARCHAR(64) NOT NULL, 
	target_uri VARCHAR NOT NULL, 
	format VARCHAR NOT NULL, 
	plan_digest VARCHAR(64) NOT NULL, 
	options TEXT NOT NULL, 
	software VARCHAR NOT NULL, 
	lossless BOOLEAN NOT NULL, 
	time VARCHAR NOT NULL, 
	PRIMARY KEY (statement), 
	FOREIGN KEY(statement) REFERENCES statement (seq), 
	FOREIGN KEY(source) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(target) REFERENCES checkpoint (checkpoint_digest)
);
INSERT INTO "conversion" VALUES(1,'9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d','/checkpoints/run/100','41007749b2f4dfe981be1eefc119cd1a1ea8434b83b1804f2da7590a42718506','6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/checkpoints/run-orbax','orbax','4b29051ea5cec38a961d064308a01dace2835d6756be84b7fb6609c0ff3c8f1b','{"scan_layers":true}','0.1.0',1,'2026-11-01T02:10:30.000+00:00');
INSERT INTO "conversion" VALUES(2,'6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/checkpoints/run-orbax','f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd','3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','/checkpoints/run-hf','huggingface','c58801ff5347882c3e2b5f6a674de035e61dcc15ac314c54d745c0a69f8087f6','{"scan_layers":true}','0.1.0',0,'2026-11-01T02:20:30.000+00:00');
INSERT INTO "conversion" VALUES(3,'6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/checkpoints/run-orbax','f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd','6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/archive/run-orbax','orbax','cdf09957368ab6fe13f51c56dbdf32ac7d393f3943c1ff1dab14e34090b93072','{"scan_layers":true}','0.1.0',1,'2026-11-01T02:30:30.000+00:00');
INSERT INTO "conversion" VALUES(12,'b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49','/checkpoints/run/100','0c3ec1e30edcde1e52fbc6f027ba48f283036f0ae9f513c96ba4d7102db2c9d0','ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','/checkpoints/run-2-hf','huggingface','96b8ef9c2838f5f5a329871e0268cd4274dc2fa6fb59f4b7e99810fb0474aeed','{"scan_layers":true}','0.1.0',1,'2026-11-01T02:40:30.000+00:00');
CREATE TABLE edge (
	source VARCHAR(64) NOT NULL, 
	target VARCHAR(64) NOT NULL, 
	plan_digest VARCHAR(64) NOT NULL, 
	statement INTEGER NOT NULL, 
	UNIQUE (source, target, plan_digest), 
	FOREIGN KEY(source) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(target) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(statement) REFERENCES statement (seq)
);
INSERT INTO "edge" VALUES('9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d','6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','4b29051ea5cec38a961d064308a01dace2835d6756be84b7fb6609c0ff3c8f1b',1);
INSERT INTO "edge" VALUES('6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','c58801ff5347882c3e2b5f6a674de035e61dcc15ac314c54d745c0a69f8087f6',2);
INSERT INTO "edge" VALUES('b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49','ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','96b8ef9c2838f5f5a329871e0268cd4274dc2fa6fb59f4b7e99810fb0474aeed',12);
CREATE TABLE location (
	checkpoint_digest VARCHAR(64) NOT NULL, 
	uri VARCHAR NOT NULL, 
	fingerprint VARCHAR NOT NULL, 
	seen VARCHAR NOT NULL, 
	statement INTEGER NOT NULL, 
	PRIMARY KEY (checkpoint_digest, uri), 
	FOREIGN KEY(checkpoint_digest) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(statement) REFERENCES statement (seq)
);
INSERT INTO "location" VALUES('9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d','/checkpoints/run/100','41007749b2f4dfe981be1eefc119cd1a1ea8434b83b1804f2da7590a42718506','2026-11-02T00:00:12.000+00:00',13);
INSERT INTO "location" VALUES('6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/checkpoints/run-orbax','f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd','2026-11-02T00:00:08.000+00:00',9);
INSERT INTO "location" VALUES('3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','/checkpoints/run-hf','2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249','2026-11-02T00:00:13.000+00:00',14);
INSERT INTO "location" VALUES('6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/archive/run-orbax','f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd','2026-11-02T00:00:02.000+00:00',3);
INSERT INTO "location" VALUES('fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244','/checkpoints/only-verified','3a503e7e3aae8ed3e54b2dfe58bad908283458c9d7cc7815f49ac8d9e4ad190d','2026-11-02T00:00:10.000+00:00',11);
INSERT INTO "location" VALUES('b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49','/checkpoints/run/100','0c3ec1e30edcde1e52fbc6f027ba48f283036f0ae9f513c96ba4d7102db2c9d0','2026-11-02T00:00:11.000+00:00',12);
INSERT INTO "location" VALUES('ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','/checkpoints/run-2-hf','ee699d30340209fad34809d85b292c4173b675e4fd059e1d074b63efee820e16','2026-11-02T00:00:14.000+00:00',15);
CREATE TABLE projection (
	name VARCHAR NOT NULL, 
	delivered INTEGER NOT NULL, 
	failed TEXT, 
	tried VARCHAR NOT NULL, 
	seal VARCHAR(64) NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "projection" VALUES('openlineage',4,'statement 5: nobody listens','2026-11-02T00:00:17.000+00:00','89e5663700207f7e823057ca530ce2fa5a21b2a5507af61776aefd6bbfaeee6f');
CREATE TABLE registration (
	checkpoint_digest VARCHAR(64) NOT NULL, 
	registry VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	version VARCHAR, 
	seen VARCHAR NOT NULL, 
	statement INTEGER NOT NULL, 
	PRIMARY KEY (checkpoint_digest, registry, name), 
	FOREIGN KEY(checkpoint_digest) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(statement) REFERENCES statement (seq)
);
INSERT INTO "registration" VALUES('3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','https://models.example','model','registered','1','2026-11-02T00:00:07.000+00:00',8);
INSERT INTO "registration" VALUES('6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','https://models.example','model','pending',NULL,'2026-11-02T00:00:08.000+00:00',9);
INSERT INTO "registration" VALUES('fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244','https://models.example','dropped','released',NULL,'2026-11-02T00:00:10.000+00:00',11);
CREATE TABLE statement (
	seq INTEGER NOT NULL, 
	prev VARCHAR(64) NOT NULL, 
	hash VARCHAR(64) NOT NULL, 
	kind VARCHAR NOT NULL, 
	schema INTEGER NOT NULL, 
	content VARCHAR(64) NOT NULL, 
	body TEXT NOT NULL, 
	time VARCHAR NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (hash)
);
INSERT INTO "statement" VALUES(1,'0000000000000000000000000000000000000000000000000000000000000000','c784d67abe18e063ff7872c7118e24f3629f2682477e8bb32ee67fc1202767e8','conversion',2,'f43c50888689db85c42f7d69b848f1fca99b62897bc103c4220db5df079eb2b9','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:10:30.000+00:00","group":"","lossless":true,"note":null,"options":{"scan_layers":true},"plan_digest":"4b29051ea5cec38a961d064308a01dace2835d6756be84b7fb6609c0ff3c8f1b","resumed_bytes":0,"schema":1,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d","fingerprint":"41007749b2f4dfe981be1eefc119cd1a1ea8434b83b1804f2da7590a42718506","format":"t5x","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":100,"tensors":2,"uri":"/checkpoints/run/100","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:10:00.000+00:00","target":{"checkpoint_digest":"6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-orbax","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(2,'c784d67abe18e063ff7872c7118e24f3629f2682477e8bb32ee67fc1202767e8','b8dc389fbef6af975c16ecd1983ac566aeed74c7e85488213013e9d915291d9d','conversion',2,'0aaee9cafc105bbcffed20f35ba9b651bc69ca605afbf1ed86dd20a2c95a1895','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:20:30.000+00:00","group":"","lossless":false,"note":null,"options":{"scan_layers":true},"plan_digest":"c58801ff5347882c3e2b5f6a674de035e61dcc15ac314c54d745c0a69f8087f6","resumed_bytes":0,"schema":1,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-orbax","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:20:00.000+00:00","target":{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:01.000+00:00');
INSERT INTO "statement" VALUES(3,'b8dc389fbef6af975c16ecd1983ac566aeed74c7e85488213013e9d915291d9d','5a79c3518e548f26656d7fe083535e0ba98ea7dd52d4ba3feb8f71d8ee0904b4','conversion',2,'b0d577ba4e6ed0242d7f7f600303dda87f870feed8d9efd898f4d1c004071663','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:30:30.000+00:00","group":"","lossless":true,"note":null,"options":{"scan_layers":true},"plan_digest":"cdf09957368ab6fe13f51c56dbdf32ac7d393f3943c1ff1dab14e34090b93072","resumed_bytes":0,"schema":1,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-orbax","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:30:00.000+00:00","target":{"checkpoint_digest":"6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/archive/run-orbax","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:02.000+00:00');
INSERT INTO "statement" VALUES(4,'5a79c3518e548f26656d7fe083535e0ba98ea7dd52d4ba3feb8f71d8ee0904b4','f65f42ec8e6afb33c83ae68b2b71491a7f5995a2f00937c0f8ec37047795b908','verification',2,'ba7d2dff7ca5406edc7160c0402043848f60e5ecf513fbdb221cebf051b21e63','{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","subject":{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"present","ok":true,"verdict":"ok"}}','2026-11-02T00:00:03.000+00:00');
INSERT INTO "statement" VALUES(5,'f65f42ec8e6afb33c83ae68b2b71491a7f5995a2f00937c0f8ec37047795b908','854e1f26206369370f5a4a777d6e42b932dc8683b17516c513345dcd33bc7153','verification',2,'84294f67241d94a0de1669ee13f1756bf370bef5905d238f26ee2390fa8ce29e','{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","subject":{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":false,"verdict":"altered"}}','2026-11-02T00:00:04.000+00:00');
INSERT INTO "statement" VALUES(6,'854e1f26206369370f5a4a777d6e42b932dc8683b17516c513345dcd33bc7153','3eb9122d2a562c6243cc74afdab0f0313a075440ab229e9ea80f7ce5a17eb9b8','verification',2,'ce154c37f762e77b30516b81e87a39fe6ec4ae45a219524fc05fc88882210941','{"checkpoint_digest":"fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","subject":{"checkpoint_digest":"fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","fingerprint":"3a503e7e3aae8ed3e54b2dfe58bad908283458c9d7cc7815f49ac8d9e4ad190d","format":"dcp","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/only-verified","weights_digest":"897bcc836c3cc5bc21fda78ba17299c2f433904f1b5fc178ea8681b522911b7d"},"verification":{"level":"digest","ok":true,"verdict":"ok"}}','2026-11-02T00:00:05.000+00:00');
INSERT INTO "statement" VALUES(7,'3eb9122d2a562c6243cc74afdab0f0313a075440ab229e9ea80f7ce5a17eb9b8','38cdcdee575dcd45595b6dd6b22dd704f14ab854fbefec5a2a1a7b08cd0ca78c','claim',2,'bfbd7d0bb3bf4aff0ed3504e7e72e4c0c0f37feba00a37a20808919dc4a2add6','{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","name":"model","registry":"https://models.example","subject":{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"}}','2026-11-02T00:00:06.000+00:00');
INSERT INTO "statement" VALUES(8,'38cdcdee575dcd45595b6dd6b22dd704f14ab854fbefec5a2a1a7b08cd0ca78c','7f05364f5e60d66b519dfd964700266bb8264ffd65ee50d60c363f3f2ed18c07','registration',2,'700491c3e55b631c232326a5a21222915ebfacdda14e916a2795df9328f99665','{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","name":"model","registry":"https://models.example","subject":{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"version":"1"}','2026-11-02T00:00:07.000+00:00');
INSERT INTO "statement" VALUES(9,'7f05364f5e60d66b519dfd964700266bb8264ffd65ee50d60c363f3f2ed18c07','e41250f26681ee0a45fee789a4c0dbfb745638bdb6d439c1eeff03a897817ccb','claim',2,'624847cc2730ddd2b70ef113b4e245831cabf18502c3fd144eae14e79fcdca81','{"checkpoint_digest":"6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","name":"model","registry":"https://models.example","subject":{"checkpoint_digest":"6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-orbax","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"}}','2026-11-02T00:00:08.000+00:00');
INSERT INTO "statement" VALUES(10,'e41250f26681ee0a45fee789a4c0dbfb745638bdb6d439c1eeff03a897817ccb','472fadd6fd287305b050a9caf17a94979ad1cf168b8bc1dba706315fadd32835','claim',2,'e14f0834cc6f90ccd1f1a32fe01acdc1c5e083b6454631b817dbaa043f3acaa6','{"checkpoint_digest":"fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","name":"dropped","registry":"https://models.example","subject":{"checkpoint_digest":"fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","fingerprint":"3a503e7e3aae8ed3e54b2dfe58bad908283458c9d7cc7815f49ac8d9e4ad190d","format":"dcp","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/only-verified","weights_digest":"897bcc836c3cc5bc21fda78ba17299c2f433904f1b5fc178ea8681b522911b7d"}}','2026-11-02T00:00:09.000+00:00');
INSERT INTO "statement" VALUES(11,'472fadd6fd287305b050a9caf17a94979ad1cf168b8bc1dba706315fadd32835','9d7c329ccdb141f3c3d5171079f46a05bd32e32b6fd803e39b9e9df2a004d148','release',2,'da7b4506582b0666c26555832708d9b2c33e2e3863a12a9490e8ca6141d2b64c','{"checkpoint_digest":"fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","name":"dropped","registry":"https://models.example","subject":{"checkpoint_digest":"fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","fingerprint":"3a503e7e3aae8ed3e54b2dfe58bad908283458c9d7cc7815f49ac8d9e4ad190d","format":"dcp","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/only-verified","weights_digest":"897bcc836c3cc5bc21fda78ba17299c2f433904f1b5fc178ea8681b522911b7d"}}','2026-11-02T00:00:10.000+00:00');
INSERT INTO "statement" VALUES(12,'9d7c329ccdb141f3c3d5171079f46a05bd32e32b6fd803e39b9e9df2a004d148','7f4b7885dfe7dee0c453f3f1127ae30bdeb083776a09069730d361af2601e481','conversion',2,'0eae35829d224c442b23516cd0678e62d00e6b6ec56c927b71e3d84b4d8f679e','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:40:30.000+00:00","group":"","lossless":true,"note":null,"options":{"scan_layers":true},"plan_digest":"96b8ef9c2838f5f5a329871e0268cd4274dc2fa6fb59f4b7e99810fb0474aeed","resumed_bytes":0,"schema":1,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49","fingerprint":"0c3ec1e30edcde1e52fbc6f027ba48f283036f0ae9f513c96ba4d7102db2c9d0","format":"t5x","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run/100","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:40:00.000+00:00","target":{"checkpoint_digest":"ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16","fingerprint":"ee699d30340209fad34809d85b292c4173b675e4fd059e1d074b63efee820e16","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-2-hf","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:11.000+00:00');
INSERT INTO "statement" VALUES(13,'7f4b7885dfe7dee0c453f3f1127ae30bdeb083776a09069730d361af2601e481','a991cedf2d19b2621fa59b60acb6a1d25f1e39e7fa05335d1f80d5332bb5d537','sighting',2,'ee11a19c9b92bca56c075b449cbe1cd9cca1ea99f451f359cfc1dd59f0be545a','{"checkpoint_digest":"9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d","subject":{"checkpoint_digest":"9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d","fingerprint":"41007749b2f4dfe981be1eefc119cd1a1ea8434b83b1804f2da7590a42718506","format":"t5x","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":100,"tensors":2,"uri":"/checkpoints/run/100","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"}}','2026-11-02T00:00:12.000+00:00');
INSERT INTO "statement" VALUES(14,'a991cedf2d19b2621fa59b60acb6a1d25f1e39e7fa05335d1f80d5332bb5d537','4d89daf5c686c4a0ef4ec22665f96762ec78d2eb03f75060922dad09d5e6b522','promotion',2,'c52e5c5c603a2efa415dddcaf49831be07adc7de38bd0745ec1ac2787359c9bc','{"alias":"champion","checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","name":"model","subject":{"checkpoint_digest":"3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"version":"1"}','2026-11-02T00:00:13.000+00:00');
INSERT INTO "statement" VALUES(15,'4d89daf5c686c4a0ef4ec22665f96762ec78d2eb03f75060922dad09d5e6b522','6c1a0b5407e4aecb0fc750e36787de03e1a629f3e4e9c98f0fe157c49358753e','deletion',2,'df2d7b9cf084df0dd2b322defd4ddb3e412c5d91ef2950bd57971f11f93e1f83','{"by":"prune","checkpoint_digest":"ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16","reason":"keep_last","subject":{"checkpoint_digest":"ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16","fingerprint":"ee699d30340209fad34809d85b292c4173b675e4fd059e1d074b63efee820e16","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-2-hf","weights_digest":"69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"uri":"/checkpoints/run-2-hf"}','2026-11-02T00:00:14.000+00:00');
INSERT INTO "statement" VALUES(16,'6c1a0b5407e4aecb0fc750e36787de03e1a629f3e4e9c98f0fe157c49358753e','c8d95d2148a4602fc4a4c4120eff85ba63b48e714c0433bfa50070e21f12e784','note',2,'db1ee105b4f329c7b7b2bc8db2778308ad1fd6c13ee4748a8c247c75775f0d93','{"text":"about no checkpoint"}','2026-11-02T00:00:15.000+00:00');
CREATE TABLE tombstone (
	checkpoint_digest VARCHAR(64) NOT NULL, 
	uri VARCHAR NOT NULL, 
	time VARCHAR NOT NULL, 
	statement INTEGER NOT NULL, 
	PRIMARY KEY (checkpoint_digest, uri), 
	FOREIGN KEY(statement) REFERENCES statement (seq)
);
INSERT INTO "tombstone" VALUES('ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','/checkpoints/run-2-hf','2026-11-02T00:00:14.000+00:00',15);
CREATE TABLE verification (
	checkpoint_digest VARCHAR(64) NOT NULL, 
	level VARCHAR NOT NULL, 
	verdict VARCHAR NOT NULL, 
	time VARCHAR NOT NULL, 
	statement INTEGER NOT NULL, 
	PRIMARY KEY (checkpoint_digest, level), 
	FOREIGN KEY(checkpoint_digest) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(statement) REFERENCES statement (seq)
);
INSERT INTO "verification" VALUES('3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','present','ok','2026-11-02T00:00:03.000+00:00',4);
INSERT INTO "verification" VALUES('3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','digest','altered','2026-11-02T00:00:04.000+00:00',5);
INSERT INTO "verification" VALUES('fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244','digest','ok','2026-11-02T00:00:05.000+00:00',6);
CREATE INDEX conversion_source ON conversion (source_fingerprint, source_uri);
CREATE INDEX edge_statement ON edge (statement);
CREATE UNIQUE INDEX statement_prev ON statement (prev);
CREATE INDEX ix_checkpoint_weights_digest ON checkpoint (weights_digest);
CREATE INDEX ix_conversion_source ON conversion (source);
CREATE INDEX ix_conversion_target ON conversion (target);
CREATE INDEX ix_conversion_target_uri ON conversion (target_uri);
CREATE INDEX ix_edge_target ON edge (target);
CREATE INDEX ix_statement_content ON statement (content);
CREATE INDEX location_uri ON location (uri, statement);
CREATE INDEX registration_name ON registration (registry, name);
CREATE INDEX statement_kind ON statement (kind, seq);
CREATE TRIGGER statement_no_update BEFORE UPDATE ON statement BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: statement'); END;
CREATE TRIGGER statement_no_delete BEFORE DELETE ON statement BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: statement'); END;
CREATE TRIGGER edge_no_update BEFORE UPDATE ON edge BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: edge'); END;
CREATE TRIGGER edge_no_delete BEFORE DELETE ON edge BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: edge'); END;
CREATE TRIGGER statement_continues BEFORE INSERT ON statement WHEN NEW.seq <> coalesce((SELECT max(seq) FROM statement), 0) + 1 OR NEW.prev <> coalesce((SELECT hash FROM statement ORDER BY seq DESC LIMIT 1), '0000000000000000000000000000000000000000000000000000000000000000') BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: this does not continue its chain'); END;
COMMIT;
